"""State in nobody's hands: the process-global generators of `random` and `numpy.random`."""

import random

import numpy as np

from envs.base import CART, SmallEnv


class GlobalRandomEnv(SmallEnv):
    """A cart in a wind that is drawn from the process-global streams.

    In a worker process these streams belong to the env; in the training process they belong to the run, which saves
    them with `RNGStreams`.
    """

    xml = CART

    def before_step(self) -> None:
        self.data.qfrc_applied[0] = random.gauss(0.0, 1.0) + np.random.standard_normal()
