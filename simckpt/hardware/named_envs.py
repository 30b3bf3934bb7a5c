"""Envs by their names, for commands that replay a session."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

import gymnasium as gym

from simckpt.errors import ConfigurationError, LinkDisarmedError
from simckpt.hardware.link import devices_out_of_reach


def made_env(text: str) -> gym.Env[Any, Any]:
    """Returns the env that a text means: "my_robot:make_env", a function of a module, or a Gymnasium id, "Ant-v5".

    No link reaches a device while it is made.

    Raises:
        ConfigurationError: there is no such function or id; or the env speaks to its device when it is made.
    """
    module, colon, function = text.partition(":")
    # modules beside the caller, as for a script
    sys.path.insert(0, os.fspath(Path.cwd()))
    try:
        with devices_out_of_reach():
            made: gym.Env[Any, Any] = getattr(importlib.import_module(module), function)() if colon else gym.make(text)
    except LinkDisarmedError as error:
        raise ConfigurationError(
            f"{text}: the env uses link {error.link!r} while it is made, and a replay reaches no device; nothing was "
            "sent. Have it do so in reset, which a replay plays from the record, or name a function that makes it "
            "without",
            keys=["env"],
        ) from error
    except (ImportError, AttributeError, gym.error.Error) as error:
        raise ConfigurationError(f"{text}: there is no such function or env ({error})", keys=["env"]) from error
    finally:
        sys.path.pop(0)
    return made
