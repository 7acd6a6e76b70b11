"""Loaded by every Python below sdcrun (PYTHONPATH): hands over to the shim where a rank may be, else does nothing.

Chains to the sitecustomize it hides, leaves sys.path as the user had it, and never raises: an exception here other than
the chained module's own would end the user's interpreter.
"""


def _start():
    import os
    import sys

    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != here]
    try:
        if os.environ.get("SDCRUN_RUN"):
            root = os.path.dirname(os.path.dirname(here))
            if "sdcrun" not in sys.modules:
                from importlib.util import module_from_spec, spec_from_file_location

                path = os.path.join(root, "__init__.py")
                spec = spec_from_file_location("sdcrun", path, submodule_search_locations=[root])
                sys.modules["sdcrun"] = module = module_from_spec(spec)
                spec.loader.exec_module(module)
            from sdcrun.shim import boot

            boot.arm()
    except BaseException as error:
        sys.stderr.write(f"[sdcrun] this process is not guarded: {error!r}\n")
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    hidden = PathFinder.find_spec("sitecustomize", sys.path)
    if hidden is not None and hidden.loader is not None:
        sys.modules["sitecustomize"] = module = module_from_spec(hidden)
        hidden.loader.exec_module(module)


try:
    _start()
finally:
    del _start
