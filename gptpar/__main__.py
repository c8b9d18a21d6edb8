"""``python -m gptpar VERB ...``"""

from gptpar.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
