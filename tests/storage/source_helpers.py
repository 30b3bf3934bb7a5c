"""Reads a checkpoint that can be copied into memory, to compare it."""

import numpy as np

from simckpt.state.leaf import Leaf
from simckpt.state.tree import Encoded
from simckpt.storage import reader
from simckpt.storage.copying import Source


def read_source(source: Source) -> dict[str, Encoded]:
    """Returns {component: encoded state}, every byte verified; raises as `Source.verify`."""
    found = {}
    for leaf in source.leaves.values():
        content = b"".join(bytes(chunk) for chunk in source.chunks(leaf))
        array = np.frombuffer(content, leaf.stored_dtype()).reshape(leaf.stored_shape)
        found[leaf.path] = Leaf(array, leaf.dtype, leaf.shape, leaf.kind)
    return reader.assemble(found)
