"""Edited copies of a checkpoint on another host: `lib.audit.edits` runs there, beside the weights, and copies none of them here."""

from __future__ import annotations

import json
from collections.abc import Sequence

from lib.errors import BadInput
from lib.hosts.remote_client import bundle, folder_on
from lib.server.remote import Place

_MAIN = """\
import json, sys
from pathlib import Path
from lib.audit.edits import edited_checkpoint
from lib.errors import WorkbookError
source, edits = json.loads(sys.stdin.read())
try:
    print(json.dumps({"made": str(edited_checkpoint(Path(source), edits))}))
except WorkbookError as error:
    print(json.dumps({"error": [error.expected, error.found, error.do]}))
"""
#: Seconds that copying the tensors of a large checkpoint may take (`kv_scales_removed`; the other edits copy none).
LONGEST_S = 3600.0


def edited_there(place: Place, source: str, edits: Sequence[str]) -> str:
    """The folder on the host of an edited copy of a checkpoint there, made in that account's cache if it is not there.

    Raises:
        BadInput: an edit finds nothing to change, or there is no such checkpoint.
        HostError: the interpreter there is older than 3.11, or the disk is full.
    """
    host, python = place.host, place.client_python(None)
    if not host.exists(source + "/config.json"):
        raise BadInput(f"server.model is a checkpoint folder on {host.name}", repr(source), "correct the path")
    with folder_on(host) as folder:
        host.put(bundle("lib.audit.edits", _MAIN)[0], folder / "edit.pyz", mode=0o600)
        words = [python, str(folder / "edit.pyz")]
        done = host.run(words, input=json.dumps([source, list(edits)]), deadline_s=LONGEST_S)
    answer = json.loads(done.check("an edited copy of the checkpoint is made").text)
    if "error" in answer:
        raise BadInput(*answer["error"])
    return str(answer["made"])
