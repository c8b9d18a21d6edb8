"""Draw loss, learning rate, gradient norm and tokens/s of runs; the same as ``gptpar plot``."""

import sys

from gptpar.reporting.plot import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
