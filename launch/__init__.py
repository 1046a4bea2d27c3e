"""How it is started: the birthmark command and its reports."""
