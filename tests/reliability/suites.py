"""The suites of `make reliability`, in the order of its table.

A suite is a function `(scale, progress) -> list[Line]` of a module in this folder: `scale` 1.0 is the full run of half
an hour on two cores, 0.1 a quick one. **Another suite is added by one line here.**
"""

SUITES = {
    "faults": "suite_faults",
    "power loss": "suite_power_loss",
    "interleavings": "suite_interleaving",
    "state machine": "suite_machine",
    "processes": "suite_stress",
    "limits": "suite_limits",
    "training scripts": "suite_kills",
    "bit flips": "suite_flips",
    "hostile files": "suite_hostile",
    "archive": "suite_archive",
    "sessions": "suite_sessions",
}
"""{name: module}, of which `run` is called."""
