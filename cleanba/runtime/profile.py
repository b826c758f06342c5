"""Records some updates of a run, with everything that runs meanwhile, by JAX's profiler."""

from pathlib import Path

import jax

WARM = 2  # updates before the recording: by then all is compiled, and actors and learner overlap


class Profile:
    """Records `updates` updates into a folder, where TensorBoard, XProf and Perfetto find them."""

    def __init__(self, folder: Path, updates: int):
        self._folder, self._updates = folder, updates
        self._seen = 0
        self._records = False

    def after_update(self) -> str | None:
        """Begin or end the recording, if it is time to.  Returns a message for the user, if there is one."""
        self._seen += 1
        if self._seen == WARM and self._updates:
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0  # tracing every Python call would slow down what is recorded
            jax.profiler.start_trace(self._folder, create_perfetto_trace=True, profiler_options=options)
            self._records = True
        elif self._seen == WARM + self._updates:
            return self.close()
        return None

    def close(self) -> str | None:
        """End the recording if there is one.  May be called twice."""
        if not self._records:
            return None
        self._records = False
        jax.profiler.stop_trace()
        return f"profile of {self._seen - WARM} updates: {self._folder}"
