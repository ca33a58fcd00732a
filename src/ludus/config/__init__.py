"""The configuration: data only, without torch."""

from ludus.config.load import config_from_toml, load_config
from ludus.config.schema import Config
from ludus.config.settings import list_settings
from ludus.config.toml import to_toml

__all__ = ["Config", "config_from_toml", "list_settings", "load_config", "to_toml"]
