"""Settings that must be in place before any test module is imported."""

import ctypes.util
import os

# one thread per process: thread pools cost time on two cores, and reductions must not depend on their number
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# mujoco picks its GL library when it is imported, and fails there if the library is missing
os.environ.setdefault("MUJOCO_GL", "egl" if ctypes.util.find_library("EGL") else "disabled")
