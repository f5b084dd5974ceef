"""A running server that the workbook did not launch: measured as it is, and watched for being the same one throughout.

Identity: on this machine the process that listens on the port (boot id, pid, start time); elsewhere, or where it may
not be read, /server_info with its start-dependent fields (`random_seed`, `startup_time`). Results are marked *attached*.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import uuid
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from lib.errors import BadInput, IdentityError
from lib.hosts import local
from lib.params import ServerParams
from lib.records import Record, ServerIdentity
from lib.server.control import Control
from lib.server.launch import RELEVANT_ENVIRONMENT, VOLATILE, changed_arguments
from lib.server.redact import redact_object


class AttachRecord(Record):
    """attach.json: which server was found at the URL, and when."""

    launch_id: str
    base_url: str
    attached: str
    boot_id: str | None
    pid: int | None
    pid_start_time: float | None
    environment: dict[str, str]
    served_model_name: str
    host: dict[str, Any]


class AttachedServer:
    """A server that is somebody else's: never stopped, never restarted."""

    origin = "attached"

    def __init__(self, record: AttachRecord, folder: Path, control: Control) -> None:
        self.record, self.folder, self.control = record, folder, control

    @property
    def base_url(self) -> str:
        return self.record.base_url

    @property
    def launch_id(self) -> str:
        return self.record.launch_id

    @classmethod
    def attach(cls, params: ServerParams, folder: Path) -> AttachedServer:
        """Finds the server at `params.attach` and records who it is.

        Raises:
            BadInput: not an http URL. ServerError: nothing answers, or not as SGLang does.
        """
        url = params.attach or ""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise BadInput("server.attach is a URL such as http://127.0.0.1:30000", repr(url))
        control = Control(url, params.api_key_env)
        info = control.server_info()
        owner = local.port_owner(parts.port or 80) if local.is_local_url(url) else None
        record = AttachRecord(
            launch_id=f"A{datetime.datetime.now():%m%d%H%M%S}-{uuid.uuid4().hex[:6]}",
            base_url=control.base_url,
            attached=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            boot_id=local.boot_id() if local.is_local_url(url) else None,
            pid=owner.pid if owner else None,
            pid_start_time=owner.start_time if owner else None,
            environment=_environment_of(owner.pid) if owner else {},
            served_model_name=control.served_model_name(),
            host=local.describe() if local.is_local_url(url) else {"hostname": parts.hostname},
        )
        place = folder / record.launch_id
        local.write_atomic(place / "attach.json", record.model_dump_json(indent=1))
        local.write_atomic(place / "server_info.json", json.dumps(info, indent=1))
        return cls(record, place, control)

    def check_identity(self) -> list[str]:
        """Checks that the URL is still answered by the server found at the start; returns what was checked.

        Raises:
            IdentityError: another process, or other resolved arguments.
        """
        faults, checks = [], []
        if self.record.pid is not None:
            owner = local.port_owner(urlsplit(self.base_url).port or 80)
            if (
                owner is None
                or owner.pid != self.record.pid
                or abs(owner.start_time - (self.record.pid_start_time or 0)) > 0.02
            ):
                faults.append(
                    f"the port belonged to pid {self.record.pid} and now to {owner.pid if owner else 'nobody readable'}"
                )
            else:
                checks.append(f"pid {owner.pid} and its start time still own the port")
        then = json.loads((self.folder / "server_info.json").read_text())
        changed = changed_arguments(then, self.control.server_info())
        if changed:
            faults.append(f"/server_info changed: {', '.join(changed[:5])}")
        else:
            checks.append("resolved arguments equal those found at the start, random_seed included")
        if faults:
            raise IdentityError(
                f"the server attached as {self.launch_id} answers on {self.base_url}", "; ".join(faults)
            )
        return checks

    def identity(self) -> ServerIdentity:
        return self.identity_of(self.folder)

    @staticmethod
    def identity_of(folder: Path) -> ServerIdentity:
        """The identity of an attached server, from its raw files alone."""
        record = AttachRecord.model_validate_json((folder / "attach.json").read_text())
        info = json.loads((folder / "server_info.json").read_text())
        resolved = {key: value for key, value in info.items() if key not in VOLATILE}
        model = {"path": info.get("model_path"), "reason": "an attached server's model files are not read"}
        parts = [info.get("version"), resolved, record.environment, model, record.host]
        return ServerIdentity(
            launch_id=record.launch_id,
            origin="attached",
            base_url=record.base_url,
            pid=record.pid,
            pid_start_time=record.pid_start_time,
            boot_id=record.boot_id,
            started=record.attached,
            sglang_version=info.get("version"),
            environment=record.environment,
            resolved_args=resolved,
            served_model_name=record.served_model_name,
            model=model,
            host=record.host,
            fingerprint=hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest(),
        )


def _environment_of(pid: int) -> dict[str, str]:
    """Relevant environment of a process, redacted; empty where it may not be read."""
    try:
        items = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return {}
    pairs = (item.decode("utf-8", "replace").partition("=") for item in items if item)
    found = {name: value for name, _, value in pairs if RELEVANT_ENVIRONMENT.match(name)}
    return dict(redact_object(found))
