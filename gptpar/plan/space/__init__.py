"""The space of layouts that ``plan --search`` predicts, ``benchmark --sweep`` measures and ``check-layouts`` proves.

A candidate (``candidate.py``) is a layout and changes to a configuration. A space (``spaces.py``) is layouts times
dimensions (``dimensions.py``): each dimension gives the options that a layout has. A verb is a space and an evaluator.
Pure: nothing here starts a process or looks at a device.
"""
