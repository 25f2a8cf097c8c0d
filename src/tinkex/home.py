"""What lies where in a server's home directory; client and server both look here."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from tinkex.errors import ConfigError


class Home(NamedTuple):
    """A server's directory, `~/.tinkex` unless told otherwise."""

    root: Path

    def create(self) -> None:
        """Make the directory, for its owner's eyes only; one that is there stays as it is."""
        try:
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            reason = error.strerror or str(error)
            raise ConfigError(f"the home {self.root} cannot be made: {reason}") from error

    @property
    def key_file(self) -> Path:
        """The key of whoever owns this home, readable by its owner alone."""
        return self.root / "key"

    @property
    def state_file(self) -> Path:
        """Which server runs here: pid, url, version. Absent when none does."""
        return self.root / "server.json"

    @property
    def server_lock(self) -> Path:
        """Locked by the server for as long as it lives."""
        return self.root / "server.lock"

    @property
    def port_file(self) -> Path:
        """The port that a server had when it could choose."""
        return self.root / "port"

    @property
    def start_lock(self) -> Path:
        """Locked by whoever is starting a server in the background."""
        return self.root / "start.lock"

    @property
    def activity_file(self) -> Path:
        """Touched while there is work; its age says how long the server has been idle."""
        return self.root / "activity"

    @property
    def log_file(self) -> Path:
        """What a server in the background says."""
        return self.root / "logs" / "server.log"

    @property
    def config_file(self) -> Path:
        """Settings of the server, when no other file is named."""
        return self.root / "server.toml"

    @property
    def profiles_file(self) -> Path:
        """Servers and keys of clients, by the names of profiles."""
        return self.root / "config.toml"

    @property
    def models_file(self) -> Path:
        """Base models that the server serves, each name with its place."""
        return self.root / "models.json"

    @property
    def models(self) -> Path:
        """Base models that were converted here, one folder each."""
        return self.root / "models"

    @property
    def tokenizers(self) -> Path:
        """Tokenizers that clients fetched from servers, one folder per digest."""
        return self.root / "tokenizers"

    @property
    def store_file(self) -> Path:
        """The database, unless the store is elsewhere."""
        return self.root / "store.db"

    @property
    def store_id_file(self) -> Path:
        """Which store the directories here belong to."""
        return self.root / "store-id"

    @property
    def checkpoints(self) -> Path:
        """Saved weights, one directory per checkpoint id."""
        return self.root / "checkpoints"

    @property
    def snapshots(self) -> Path:
        """States of models in training, from which they come back after a crash."""
        return self.root / "snapshots"

    def checkpoint_directory(self, checkpoint_id: str) -> Path:
        """The directory of a checkpoint; the id is one the server made, never a client's word."""
        return self.checkpoints / checkpoint_id
