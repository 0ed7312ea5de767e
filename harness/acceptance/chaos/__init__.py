"""Random faults over whole runs, and afterwards what is promised of them: `make chaos`."""
