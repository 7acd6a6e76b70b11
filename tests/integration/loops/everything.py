"""The training loops of the files named here one after another in one process group."""

import compiled
import ddp_modules
import ddp_options
import optimizers
import perturbed
import strange
import surroundings
import workers
from record import main

if __name__ == "__main__":
    files = (optimizers, perturbed, ddp_options, ddp_modules, compiled, strange, surroundings, workers)
    main([loop for file in files for loop in file.LOOPS])
