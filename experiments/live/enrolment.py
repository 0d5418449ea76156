"""Enrolment: one file with all that a device needs to join a swarm that admits only invited devices.

The owner's folder of a swarm has

    owner.key       the owner's key, which signs invitations: keep it, and keep it secret
    authority/      the certificate authority of the broker
    secrets/        the passwords of all users of the broker
    broker/         what the broker needs: its certificate, users and permissions; swarm.json, which has name,
                    broker and peers of the swarm; and the broker's retained messages
    rules/, HOST/   for a cluster of nats-servers: users and permissions, and what each of its nodes needs
    NAME.gossamer   one file for each device: secret, because it contains the device's key and password

On the device the file is unpacked beside the device's results, each part into a file of its own.
"""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from gossamer.files import write_atomically

from ...gossip import Address
from ...gossip.security import (
    Identity,
    TrustError,
    check_label,
    invitation_text,
    invite,
    public_text,
    read_secret,
    write_secret,
)
from ..errors import ConfigError

FORMAT: Final = "gossamer-enrolment"
VERSION: Final = 1
OBSERVER: Final = "observer"
"""The user of the broker that may read what peers publish about themselves, and nothing else."""
ENDING: Final = ".gossamer"


class Enrolment(BaseModel):
    """The content of one device's file.

    identity: the device's private key. invitation: what admits it. owner: the owner's public key.
    ca: the certificate of the broker's authority; None without TLS. models: the partial models to which the
    invitation admits it, by name or pattern; None for all. settings: of a device's TOML file, used unless
    that file has them.

    Keys that a later version has added are ignored. A key that is added after 1.0 needs a default.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    format: Literal["gossamer-enrolment"] = FORMAT
    version: int = VERSION
    swarm: str
    broker: str
    label: str
    identity: str
    invitation: str
    owner: str
    password: str
    ca: str | None
    models: list[str] | None
    settings: dict[str, Any]

    @classmethod
    def read(cls, path: Path) -> Enrolment:
        """Read a device's file; ConfigError, whose text contains no secrets, if that is not possible."""
        try:
            table = json.loads(path.read_bytes())
            if table["format"] != FORMAT:
                raise KeyError
            version = table["version"]
            read_secret(path)  # refuses what other users can read
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
        except TrustError as error:
            raise ConfigError(str(error)) from None
        except (ValueError, KeyError, TypeError, RecursionError):
            raise ConfigError(
                f"{path}: is not a file of gossamer enrol; a device's TOML file is given with --config"
            ) from None
        if version != VERSION:
            raise ConfigError(
                f"{path}: is an enrolment of version {str(version)[:20]}, and this gossamer reads version "
                f"{VERSION}: install the version that the swarm's owner has"
            )
        try:
            return cls.model_validate(table)
        except ValidationError as error:
            first = error.errors(include_input=False, include_url=False)[0]
            key = ".".join(map(str, first["loc"]))
            raise ConfigError(f"{path}: key {key!r}: {first['msg']}") from None

    def key(self) -> Identity:
        """Return the device's key; ConfigError if it is damaged."""
        try:
            return Identity.parse(self.identity)
        except ValueError as error:
            raise ConfigError(f"enrolment of {self.label}: its key is damaged: {error}") from None

    def paths(self, folder: Path) -> dict[str, Path]:
        """Return where `unpack` writes key, invitation and certificate, by name; the files may not exist yet.

        Raises ConfigError if the folder has those of another enrolment. A corrected file of the same one may
        name another certificate.
        """
        files = self._files(folder)
        changed = {
            name: path
            for name, (path, text) in files.items()
            if path.exists() and read_secret(path) != text
        }
        is_corrected = set(changed) == {"ca"} and files["identity"][0].exists()
        if changed and not is_corrected:
            raise ConfigError(
                f"{next(iter(changed.values()))}: belongs to another enrolment of {self.label}; to use the "
                f"new one, give another folder with --out, or move {folder} away"
            )
        return {name: path for name, (path, _) in files.items()}

    def unpack(self, folder: Path) -> dict[str, Path]:
        """Write key, invitation and certificate into a folder; return their paths by name.

        Files that are there already stay if they are the same: the command may be repeated.
        """
        paths = self.paths(folder)
        for path, text in self._files(folder).values():
            if path.exists() and read_secret(path) != text:
                path.unlink()  # the certificate, see `paths`
            if not path.exists():
                write_secret(path, text)
        return paths

    def _files(self, folder: Path) -> dict[str, tuple[Path, str]]:
        files = {
            "identity": (folder / f"{self.label}.key", self.identity),
            "invitation": (folder / f"{self.label}.invitation", self.invitation),
        }
        return files if self.ca is None else files | {"ca": (folder / "ca.pem", self.ca)}


class SwarmFolder:
    """The owner's folder of one swarm: see the top of this file.

    url: the broker's, as devices reach it; for a cluster, those of all its nodes, with commas between them.
    """

    def __init__(self, folder: Path, swarm: str, url: str) -> None:
        self.folder, self.swarm, self.url = folder, swarm, url
        self._nodes = Address.parse_all(url)
        self._address = self._nodes[0]
        if any(node.username is not None for node in self._nodes):
            raise ConfigError("enrol: --broker: leave the user out; every device gets its own")
        if any(node.transport != "tcp" for node in self._nodes):
            raise ConfigError("enrol: --broker: devices are enrolled for mqtts:// or mqtt://")
        if self._is_cluster and len(self._nodes) not in (3, 5):
            raise ConfigError(
                f"enrol: --broker: a cluster has 3 or 5 nodes, not {len(self._nodes)}, so that a majority "
                "stays when one is lost"
            )
        if self._is_cluster and not self._address.tls:
            raise ConfigError("enrol: --broker: the nodes of a cluster use TLS; write mqtts://")
        if len({node.port for node in self._nodes}) > 1:
            raise ConfigError(
                "enrol: --broker: the nodes of a cluster must listen on one port; give the same for all"
            )

    @property
    def _is_cluster(self) -> bool:
        return len(self._nodes) > 1

    @property
    def _rules_folder(self) -> Path:
        """The folder with the broker's users and permissions."""
        return self.folder / "rules" if self._is_cluster else self.broker_folder

    @property
    def broker_folder(self) -> Path:
        """The folder with what the broker needs."""
        return self.folder / "broker"

    @property
    def _secrets_folder(self) -> Path:
        return self.folder / "secrets"

    def enrol(
        self,
        labels: Sequence[str],
        *,
        models: Sequence[str] | None,
        days: float,
        settings: dict[str, Any],
    ) -> list[Path]:
        """Write one file for each device, and the broker's users; return the paths of the files.

        models, settings: see `Enrolment`. days: how long the invitations are valid.
        """
        from ...peer import write_cluster, write_rules  # they import what devices do not need

        description = self._read_description()
        names: dict[str, str] = dict(description.get("peers", {}))  # NAME@ID by label
        for label in labels:
            check_label(label)
            if labels.count(label) > 1:
                raise ConfigError(f"enrol: {label} is named twice; give each device its own name")
            if label in names:
                raise ConfigError(
                    f"enrol: {label} is enrolled in {self.folder} already, as {names[label]}; "
                    "give the device another name"
                )
            if (path := self.folder / f"{label}{ENDING}").exists():
                raise ConfigError(f"enrol: {path}: exists already; move it away")
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        owner, ca = self._owner(), self._certificates()
        identities = [Identity.generate(label) for label in labels]
        names |= {each.label: each.name for each in identities}
        if self._is_cluster:
            hosts = [each.host for each in self._nodes]
            write_cluster(
                self.folder, hosts, port=self._address.port, swarm=self.swarm, peers=names.values(),
                observers=[OBSERVER], passwords_in=self._secrets_folder,
            )  # fmt: skip
        rules = write_rules(
            self._rules_folder, self.swarm, names.values(), observers=[OBSERVER],
            passwords_in=self._secrets_folder,
        )  # fmt: skip
        written = []
        for identity in identities:
            invitation = invite(
                owner, self.swarm, identity.label, identity.public, models=models, days=days
            )
            enrolment = Enrolment(
                swarm=self.swarm, broker=self.url, label=identity.label,
                identity=identity.to_text(), invitation=invitation_text(invitation),
                owner=public_text(owner.public),
                password=rules.secrets[identity.name].read_text("utf-8").strip(),
                ca=ca, models=None if models is None else list(models), settings=settings,
            )  # fmt: skip
            path = self.folder / f"{identity.label}{ENDING}"
            write_secret(path, enrolment.model_dump_json(indent=1) + "\n")
            written.append(path)
        self._write_description(names)
        return written

    def next_steps(self) -> list[str]:
        """Return what to do next: where the broker runs, with which command, and how to look at the swarm."""
        return [*self._broker_steps(), f"look at it: {self.status_command()}"]

    def status_command(self) -> str:
        """Return the command that shows the swarm, as a broker's user that may only read."""
        command = ["gossamer", "status", self.url.replace("://", f"://{OBSERVER}@"), self.swarm]
        command += ["--password-file", str(self._secrets_folder / OBSERVER)]
        if self._address.tls:
            command += ["--ca", str(self.folder / "authority" / "ca.pem")]
        command += ["--owner", public_text(self._owner().public)]
        return shlex.join(command)

    def _broker_steps(self) -> list[str]:
        """Return how to start the broker, or each node of a cluster, or how it learns of new devices."""
        from ...peer import is_loopback, machine_names

        if self._is_cluster:
            return [
                f"{host}: run  scp -rp {node} {host}:  and there, in {node.name}, nats-server -c nats.conf; "
                "one that runs reads its users again after nats-server --signal reload"
                for host in (each.host for each in self._nodes)
                for node in [self.folder / host.replace(":", "-")]
            ]
        start = f"gossamer broker --enrolled {self.folder}"
        if is_loopback(self._address.host) or self._address.host in machine_names():
            return [f"broker: a running one reads its users again by itself; else run {start}"]
        host = self._address.host
        return [
            f"broker: run  scp -rp {self.broker_folder} {host}:{self.folder.name}/  and a running one reads "
            f"its users again by itself; else run there  gossamer broker --enrolled {self.folder.name}"
        ]

    def _read_description(self) -> dict[str, Any]:
        """Return the content of swarm.json; ConfigError if the folder is another swarm's or broker's."""
        path = self.broker_folder / "swarm.json"
        if not path.exists():
            return {}
        description = read_description(self.folder)
        for key, value in (("swarm", self.swarm), ("broker", self.url)):
            if description[key] != value:
                raise ConfigError(
                    f"enrol: {path}: {key} is {description[key]} here, not {value}; give another --folder"
                )
        return description

    def _write_description(self, names: dict[str, str]) -> None:
        """Write swarm.json; names: the full name of every enrolled peer, by label."""
        self.broker_folder.mkdir(exist_ok=True)
        text = json.dumps({"swarm": self.swarm, "broker": self.url, "peers": names}, indent=1)
        write_atomically(self.broker_folder / "swarm.json", text + "\n")

    def _owner(self) -> Identity:
        """Return the owner's key, which is created at first use."""
        path = self.folder / "owner.key"
        if not path.exists():
            Identity.generate("owner").save(path)
        return Identity.load(path)

    def _certificates(self) -> str | None:
        """Issue the broker's certificate if it needs one; return the authority's, None without TLS."""
        if not self._address.tls:
            return None
        from ...peer import Authority

        authority = Authority.open(self.folder / "authority")
        if self._is_cluster:  # write_cluster issues those of the nodes
            return authority.certificate.read_text("utf-8")
        if authority.why_renew_server([self._address.host]):
            authority.issue_server([self._address.host])
        self.broker_folder.mkdir(exist_ok=True)
        for file in (authority.certificate, authority.server.certificate, authority.server.key):
            shutil.copy2(file, self.broker_folder / file.name)
        return authority.certificate.read_text("utf-8")


def read_description(folder: Path) -> dict[str, Any]:
    """Return name, broker and peers of the swarm in an owner's folder, of which `broker/` is enough."""
    path = folder / "broker" / "swarm.json"
    try:
        description = json.loads(path.read_text("utf-8"))
        return {key: description[key] for key in ("swarm", "broker", "peers")}
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read: {error.strerror}; name the folder that gossamer enrol has written"
        ) from None
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"{path}: is damaged; restore a copy") from None
