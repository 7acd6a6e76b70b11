"""`sdcrun campaign`: a matrix of faults on the user's own job, launch after launch until each cell has a result."""
