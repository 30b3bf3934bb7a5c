"""Trees in memory: leaves and structures, copies, random generators, and handles on the live objects of a program."""

from simckpt.state.compare import (
    Difference,
    compare_leaves,
    differences,
    encoded_differences,
    leaf_distance,
    outline,
)
from simckpt.state.components import Handle, attributes_of, handle_for
from simckpt.state.leaf import LogLeaf, Piece
from simckpt.state.logs import LogColumn, LogHandle
from simckpt.state.loop import LoopState
from simckpt.state.nodes import ObjectState
from simckpt.state.registry import register_container, register_leaf
from simckpt.state.reseeding import reseed
from simckpt.state.rng import generator_state, new_generator, set_generator_state
from simckpt.state.streams import RNGStreams, global_streams_state, load_global_streams
from simckpt.state.tree import Encoded, Leaf, copy_tree, decode, encode, leaf_value, without_parts

__all__ = [
    "Difference",
    "Encoded",
    "Handle",
    "Leaf",
    "LogColumn",
    "LogHandle",
    "LogLeaf",
    "LoopState",
    "ObjectState",
    "Piece",
    "RNGStreams",
    "attributes_of",
    "compare_leaves",
    "copy_tree",
    "decode",
    "differences",
    "encode",
    "encoded_differences",
    "generator_state",
    "global_streams_state",
    "handle_for",
    "leaf_distance",
    "leaf_value",
    "load_global_streams",
    "new_generator",
    "outline",
    "register_container",
    "register_leaf",
    "reseed",
    "set_generator_state",
    "without_parts",
]
