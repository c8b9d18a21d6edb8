"""The CPU optimizer's two phases of buckets whose update is one of matrices (Muon).

Phase one (:func:`update_momenta`) updates a bucket's momentum in the updating thread, and sends the Nesterov momentum
to the device. In :meth:`~gptpar.engine.master_optimizer.MasterOptimizer.step` the training loop waits for that,
orthogonalizes the matrices, and submits the directions. Phase two is an ordinary update of the bucket with its
direction as gradient.

The two never wait for each other in a circle. In phase one the thread waits for nothing but gradients and the memory
that the loop gives for a unit's momenta. It takes the buckets that have memory, and finishes them before it waits. The
loop gives this memory before it waits for the unit's momenta, so what it waits for is always done next. In phase two
the thread waits for directions. By then all momenta are there, and the loop needs nothing more of the thread to submit
the rest. Other processes' loops, with which the loop exchanges matrices, wait for their own threads likewise.

These buckets do not speculate. Clipping scales the gradient before it enters the momentum, so that every element of an
orthogonalized matrix depends on it: a speculation that turns out wrong would cost the assembly and
the orthogonalization once more. Nor could the loop orthogonalize anything before the backward pass has ended.
"""

from __future__ import annotations

from gptpar.offload.kernel_queue import KernelQueue
from gptpar.offload.shared_state import SharedState
from gptpar.offload.step_request import StepHyperparameters


def update_momenta(
    shared: SharedState, queue: KernelQueue, hyperparameters: StepHyperparameters, without: frozenset[str]
) -> None:
    """Phase one of all buckets whose update is one of matrices.

    Args:
        without: units that do not change.
    """
    left = [one for one in shared.buckets if one.matrix_kernel is not None and one.unit not in without]
    while left:
        bucket = next((one for one in left if one.momenta is not None), None)
        if bucket is None:
            queue.finish()
            shared.thread_waits(lambda: any(one.momenta is not None for one in left))
            continue
        left.remove(bucket)
        for coming in (bucket, *left[:1]):
            assert coming.grad is not None
            coming.grad.begin(urgent=True)
        queue.begin_average(bucket, hyperparameters)
    queue.finish()
