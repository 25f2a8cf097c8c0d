"""Worker groups on a Ray cluster: pools, scaling, and the process that starts and stops groups."""
