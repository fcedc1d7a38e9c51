"""Starting SGLang: the stand-ins of a CPU first, in every process; then the proof that our plugin was found.

sglang must not be imported at the top of this module: new processes import it to learn what to run.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from minite.errors import UserError
from minite.sampler.sglang import cpu_stand_ins
from minite.sampler.sglang.names import METHOD


class Child:
    """A function of SGLang's that a new process shall run, with the stand-ins in place there before sglang is imported.

    multiprocessing sends the function ahead of its arguments, and unpickling those imports sglang already.
    """

    def __init__(self, module: str, name: str) -> None:
        self.module, self.name = module, name

    def __setstate__(self, state: dict[str, str]) -> None:
        self.__dict__.update(state)
        cpu_stand_ins.install()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return getattr(import_module(self.module), self.name)(*args, **kwargs)


CHILDREN = {
    "run_scheduler_process_func": Child("sglang.srt.managers.scheduler", "run_scheduler_process"),
    "run_detokenizer_process_func": Child("sglang.srt.managers.detokenizer_manager", "run_detokenizer_process"),
}


def make_engine(arguments: dict[str, Any]) -> Any:
    """An sglang.Engine whose processes are those above, with ``abort``. To be called where it will be used."""
    cpu_stand_ins.install()
    from sglang.srt.entrypoints.engine import Engine

    require_plugin()

    class PreparedEngine(Engine):
        run_scheduler_process_func = staticmethod(CHILDREN["run_scheduler_process_func"])
        run_detokenizer_process_func = staticmethod(CHILDREN["run_detokenizer_process_func"])

        def abort(self, request_id: str) -> None:
            """End a live request, from another thread than the one that generates."""
            self.loop.call_soon_threadsafe(self.tokenizer_manager.abort_request, request_id)

    return PreparedEngine(**arguments)


def require_plugin() -> None:
    """SGLang only logs it when a plugin fails. UserError when ours is not there, its own exception when it failed."""
    from sglang.srt.layers.quantization import QUANTIZATION_METHODS
    from sglang.srt.plugins import load_plugins

    load_plugins()
    if METHOD not in QUANTIZATION_METHODS:
        from minite.sampler.sglang import plugin

        plugin.register()
        raise UserError(
            "SGLang did not find miniTE's plugin: install miniTE with pip (pip install -e .) in the environment that "
            "SGLang runs in, and if SGLANG_PLUGINS is set, name 'minite' there"
        )
