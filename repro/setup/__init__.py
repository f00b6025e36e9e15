"""Set-up of the environment, and what this machine can run. Standard library only.

bootstrap     makes the environment, from nothing but a Python
packages      installs into it, and says meanwhile how far that is
lab           JupyterLab on working copies of the notebooks
environment   environment variables and folders that every run needs
machine       what this machine is, for manifests
doctor        what can and cannot run here, and why"""
