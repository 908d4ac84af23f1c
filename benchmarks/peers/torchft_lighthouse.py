"""torchft's lighthouse, as its program of this name: options follow."""

from torchft._torchft import lighthouse_main

lighthouse_main()
