"""The training loops of the files named here one after another in one process group."""

import compiled
import ddp_options
import optimizers
import strange
import workers
from record import main

if __name__ == "__main__":
    main(optimizers.LOOPS + ddp_options.LOOPS + compiled.LOOPS + strange.LOOPS + workers.LOOPS)
