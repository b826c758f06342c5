"""One compilation cache for all tests and every process that they start: most compile the same few programs.

Imported before JAX, which reads these variables once.
"""

import atexit
import os
import shutil
import tempfile

FOLDER = "JAX_COMPILATION_CACHE_DIR"
if FOLDER not in os.environ:
    os.environ[FOLDER] = tempfile.mkdtemp(prefix="cleanba-tests-")
    atexit.register(shutil.rmtree, os.environ[FOLDER], ignore_errors=True)
ENVIRONMENT = {
    FOLDER: os.environ[FOLDER],
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.2",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}
os.environ.update(ENVIRONMENT)
