"""What reads results and starts jobs, and is never part of one."""
