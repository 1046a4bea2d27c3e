"""The processes of a run: the launcher's facts about them, their group, and joint failure."""
