"""A running server that the workbook did not launch: measured as it is, and watched for being the same one throughout.

Identity: /server_info (every field that stays the same while a server lives, `random_seed` included) and, on this
machine, the process that listens on the port (boot id, pid, start). Elsewhere, or where the process may not be read, only
the former is left, and every check says that this is weak. Results are marked *attached*.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import uuid
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

from lib.errors import BadInput, IdentityError
from lib.hosts import local
from lib.hosts.local import ProcessId
from lib.params import ServerParams
from lib.server.control import Control
from lib.server.launch import RELEVANT_ENVIRONMENT, VOLATILE, LaunchRecord, compare_server_info, save_record
from lib.server.redact import redact_object, redact_text


class AttachedServer:
    """A server that is somebody else's: never stopped, never restarted."""

    origin = "attached"

    def __init__(self, record: LaunchRecord, folder: Path, control: Control) -> None:
        self.record, self.folder, self.control = record, folder, control

    @property
    def base_url(self) -> str:
        return self.record.base_url

    @property
    def launch_id(self) -> str:
        return self.record.launch_id

    @classmethod
    def attach(cls, name: str, params: ServerParams, folder: Path) -> AttachedServer:
        """Finds the server at `params.attach` and records who it is (launch.json with origin `attached`).

        Raises:
            BadInput: not an http URL, one with a user name in it, or no such log file.
            ServerError: nothing answers, or not as SGLang does.
        """
        url = params.attach or ""
        parts, port = _address(url)
        control = Control(url, params.api_key_env)
        info = control.server_info()
        here = local.is_local_url(url)
        owner = local.port_owner(port) if here else None
        lasting = {name: value for name, value in info.items() if name not in VOLATILE or name == "random_seed"}
        process = [owner.pid, owner.start_time if owner.ticks is None else owner.ticks] if owner else None
        seen = [control.base_url, local.boot_id() if here else None, process, lasting]
        now = datetime.datetime.now(datetime.UTC)
        record = LaunchRecord(
            launch_id=f"A{datetime.datetime.now():%m%d%H%M%S}-{uuid.uuid4().hex[:6]}",
            name=name,
            origin="attached",
            key=hashlib.sha256(json.dumps(seen, sort_keys=True).encode()).hexdigest()[:16],
            argv=[],
            environment=_environment_of(owner.pid) if owner else {},
            sglang_version=str(info["version"]),
            model_path=str(info.get("model_path")),
            model={"path": info.get("model_path"), "reason": "the model files of an attached server are not read"},
            host=local.describe() if here else {"hostname": parts.hostname, "reason": "not this machine"},
            base_url=control.base_url,
            port=port,
            started=now.isoformat(timespec="seconds"),
            started_at=now.timestamp(),
            state="attached",
            pid=owner.pid if owner else None,
            pid_start_time=owner.start_time if owner else None,
            pid_start_ticks=owner.ticks if owner else None,
            served_model_name=control.served_model_name(),
        )
        place = folder / record.launch_id
        save_record(place, record)
        local.write_atomic(place / "server_info.json", json.dumps(info, indent=1))
        if params.log:
            local.write_atomic(place / "server.log", _redacted_log(params.log, control.secrets))
        return cls(record, place, control)

    def check_identity(self) -> list[str]:
        """Checks that the URL is still answered by the server found at the start; returns what was checked.

        Raises:
            IdentityError: another process, or other resolved arguments.
        """
        faults, checks = [], []
        if self.record.pid is not None:
            found = ProcessId(self.record.pid, self.record.pid_start_time or 0.0, self.record.pid_start_ticks)
            owner = local.port_owner(self.record.port)
            if owner is not None and owner.pid == found.pid and found.alive():
                checks.append(f"pid {owner.pid} and its start time still own the port")
            elif owner is not None and owner.pid == found.pid:
                faults.append(f"pid {owner.pid} owns the port as before, but it is another process: it started later")
            else:
                faults.append(
                    f"the port belonged to pid {found.pid} and now to {owner.pid if owner else 'nobody readable'}"
                )
        else:
            checks.append(
                "weak identity: neither pid nor start time of the server can be read from here, only /server_info is "
                "compared; a restart with the same arguments and random_seed would not be noticed"
            )
        compare_server_info(self.folder, self.control, "when it was found", faults, checks)
        if faults:
            raise IdentityError(
                f"the server attached as {self.launch_id} answers on {self.base_url}", "; ".join(faults)
            )
        return checks


def _address(url: str) -> tuple[SplitResult, int]:
    """The parts of an http URL, and its port."""
    if "@" in url.partition("?")[0]:
        raise BadInput(
            "server.attach is a URL without a user name or password",
            "there is one in it (not repeated here)",
            "take it out; an API key is given by server.api_key_env",
        )
    try:
        parts = urlsplit(url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError as error:
        raise BadInput("server.attach is a URL such as http://127.0.0.1:30000", redact_text(str(error))) from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise BadInput("server.attach is a URL such as http://127.0.0.1:30000", repr(redact_text(url)))
    return parts, port


def _redacted_log(file: str, secrets: list[str]) -> str:
    try:
        text = Path(file).expanduser().read_text(errors="replace")
    except OSError as error:
        raise BadInput(f"server.log names the attached server's log: {file!r}", error.strerror) from error
    return redact_text(text, secrets)


def _environment_of(pid: int) -> dict[str, str]:
    """Relevant environment of a process, redacted; empty where it may not be read."""
    try:
        items = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return {}
    pairs = (item.decode("utf-8", "replace").partition("=") for item in items if item)
    found = {name: value for name, _, value in pairs if RELEVANT_ENVIRONMENT.match(name)}
    return dict(redact_object(found))
