"""What a config says about matching: checked before anything is built."""

from __future__ import annotations

from .tables import Config, ConfigError, Model


def check_matching(config: Config, source: str) -> None:
    """Refuse matching that cannot be had, naming the key."""
    seen: dict[str, tuple[int, Model]] = {}
    for place, model in enumerate(config.models):
        key = f"{source}: key 'models.{place}"
        if model.matching != "none" and "<>" in config.network.layout:
            raise ConfigError(
                f"{key}.matching': cells are matched in chains of dense layers, which the associative "
                "network is not"
            )
        if model.matching == "fuse" and config.network.named:
            raise ConfigError(
                f"{key}.matching': only chains of dense layers are fused, which {config.network.named!r} is "
                "not known to be; peers of one architecture can use align"
            )
        if model.matching != "fuse" and (model.width or model.bound):
            what = "width" if model.width else "bound"
            raise ConfigError(f'{key}.{what}\': is for matching = "fuse" alone; leave it out')
        if model.matching == "fuse" and model.width is None:
            raise ConfigError(
                f"{key}.width': is missing; fuse needs the common layout, at least as wide as the widest "
                f"slice of {model.name!r}"
            )
        if model.matching == "fuse" and not _starts_together(config):
            raise ConfigError(
                f"{key}.matching': fuse starts all peers from common values; set equal_starts = true, or "
                "name what they bring in network.trained"
            )
        other, first = seen.setdefault(model.name, (place, model))
        for what in ("matching", "width", "bound", "depends"):
            if getattr(first, what) != getattr(model, what):
                raise ConfigError(
                    f"{key}.{what}': models.{other} says {getattr(first, what)!r} of the same model "
                    f"{model.name!r}; give both the same"
                )


def _starts_together(config: Config) -> bool:
    return config.network.equal_starts or config.network.trained is not None


def starts_apart(config: Config) -> bool:
    """Whether peers come with values of their own, which matching has to bring into one order."""
    own = config.network.trained is not None or not config.network.equal_starts
    return own and any(model.matching != "none" for model in config.models)


def without_networks(config: Config) -> Config:
    """The same swarm, where the networks that peers bring along are handed over otherwise."""
    return config.model_copy(
        update={"network": config.network.model_copy(update={"trained": None})}
    )
