"""Processes of this machine: started, watched and ended here."""
