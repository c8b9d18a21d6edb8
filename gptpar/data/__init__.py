"""Token corpora on disk, the samples cut from them, and the micro-batches a rank trains on.

Each module builds on the ones before: `indexed` (the files), `splits`, `kernels` (native loops), `index_cache`,
`gpt_dataset` (samples of one corpus), `blend` (of several), `order` (which rank reads which sample), `loader` (tensors)
and `build` (all of it from plain arguments). Import from the module you need; this package imports nothing by itself.
"""
