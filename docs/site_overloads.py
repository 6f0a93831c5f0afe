"""What griffe calls while it reads the package for the API pages (mkdocs.yml).

In a stub an overloaded function has no implementation, and griffe then leaves it out: `horoclone.alltoall`.
"""

from __future__ import annotations

from typing import Any

import griffe


class Overloads(griffe.Extension):
    """Makes a function of the overloads in a stub: the parameters of the last, the docstring of the first."""

    def on_module_members(self, *, mod: griffe.Module, **_: Any) -> None:
        if isinstance(mod.filepath, list) or mod.filepath.suffix != ".pyi":
            return
        for name, overloads in list(mod.overloads.items()):
            if overloads and name not in mod.members:
                first, last = overloads[0], overloads[-1]
                function = griffe.Function(
                    name, parameters=last.parameters, returns=last.returns, lineno=first.lineno,
                    endlineno=last.endlineno, docstring=first.docstring, parent=mod,
                )  # fmt: skip
                function.overloads = list(overloads)
                mod.set_member(name, function)
                del mod.overloads[name]
