"""Entry points: the birthmark command and its reports."""
