"""The parts of quickstart.py: its processes, the phases that it runs, and the table that it prints."""
