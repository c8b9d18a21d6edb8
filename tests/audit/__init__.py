"""What a large change did to the tests and to the size of the code, between two commits.

python -m tests.audit tests OLD NEW    which test became which; asserts that went, tolerances that changed
python -m tests.audit lines OLD NEW    logical lines of each room
"""
