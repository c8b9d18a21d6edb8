"""Token corpora on disk, the samples cut from them, and the micro-batches that a rank trains on.

Each module builds on the ones before it: ``indexed`` (a corpus's files), ``splits`` (training, validation, test),
``kernels`` (loops in C++), ``index_cache`` (index arrays on disk), ``gpt_dataset`` (samples of one corpus), ``blend``
(samples of several), ``order`` (which rank reads which sample), ``loader`` (tensors of a micro-batch), and ``build``
(all of it from plain arguments). Import from the module you need; this package imports nothing by itself.
"""
