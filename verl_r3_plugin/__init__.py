"""Rollout routing replay (R3) for unmodified VERL, Agent Lightning, vLLM and Megatron-core.

Importing this package imports numpy and nothing heavier: a gateway needs no torch, and `import verl` must not pull in Megatron.

The import is also what arms the plugin in a process of VERL. verl 0.8 knows nothing but "import the module that
`actor_rollout_ref.model.external_lib` names", and 0.9 only loads its entry point; in both the import is all that happens. Arming imports
no host and changes none: it waits for VERL's configuration to ask for R3 (`hosts/verl/activation.py`).
"""

__version__ = "0.1.0"

from .hosts.verl import activate as _arm

_arm()
