"""Report: pages, pictures, tables and terminal output for people."""
