"""The proof of ``gptpar.initialize``: small models and oddities, the same in plain torch, and the comparison.

    python -m tests.any_module --help          one case or many by hand, with a table of deviations
    python -m tests.any_module --full          all cases in all layouts of ``layouts.py``, in about two hours
    pytest tests/any_module                    a covering subset

``case.py`` says what a case is. ``zoo.py`` and ``oddities/`` hold models, ``scenarios/`` what users do beside training;
``cases.py`` has all by name. ``reference.py`` trains them in plain torch, ``harness.py`` with an engine, ``compare.py``
compares, and ``matrix.py`` does so in processes. That the comparison sees mistakes is shown by
``tests/mutations``.
"""
