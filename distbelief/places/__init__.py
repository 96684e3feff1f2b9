"""Places to run a job: processes of this machine, or a simulated cluster."""
