"""Checkpoints by their id on the model hub, `org/name` or `org/name@revision`.

`ids` reads such names, `client` speaks to the hub through `huggingface_hub` (the extra `hub`),
`files` says which files of a repository are needed, `headers` fetches metadata without weights, and
`resolve` is what commands use: a folder for what a user gave, be it a path or an id.
"""

from edgecc.hub.ids import HubId, parse_id
from edgecc.hub.resolve import checkpoint_folder, hub_id, metadata_place

__all__ = ["HubId", "checkpoint_folder", "hub_id", "metadata_place", "parse_id"]
