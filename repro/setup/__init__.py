"""Set-up of the environment and what this machine can run; standard library only."""
