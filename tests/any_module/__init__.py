"""The proof of ``gptpar.initialize``: small models and oddities, the same in plain torch, and the comparison.

    python -m tests.any_module --help          one case or many by hand, with a table of deviations
    pytest tests/any_module                    a covering subset

``case.py`` says what a case is, ``zoo.py`` and ``oddities/`` hold them, ``reference.py`` trains them in plain torch,
``harness.py`` with an engine, ``compare.py`` compares. ``plain_engine.py`` is an engine in plain torch, on which the
harness itself is tested, with mistakes planted.
"""
