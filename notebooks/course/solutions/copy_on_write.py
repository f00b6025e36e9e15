"""Solution of lesson 3."""

from repro.course import copy_on_write
from repro.engine.memory import CacheOp, OpKind


class Manager(copy_on_write.Manager):
    def append_slots(self, group, num_tokens):
        ops = []
        for seq in group.seqs:
            table = self._tables[seq]
            if (num_tokens - 1) % self.block_size == 0:
                table.append(self.gpu.allocate())
            elif self.gpu.ref_counts[table[-1]] > 1:
                copy = self.gpu.allocate()
                ops.append(CacheOp(OpKind.COPY, table[-1], copy))
                self.gpu.release([table[-1]])
                table[-1] = copy
        return ops


def apply(ops, gpu, cpu):
    for op in ops:  # in the order issued
        source = cpu if op.kind is OpKind.SWAP_IN else gpu
        target = cpu if op.kind is OpKind.SWAP_OUT else gpu
        target[op.dst] = list(source[op.src])
