"""The errors this package raises on purpose. Each message says what was expected, what was found, where, and which key changes it."""


class R3Error(Exception):
    """Base of every error raised on purpose by this package."""


class SchemaError(R3Error):
    """A model's routing cannot be described, or two descriptions of it disagree."""


class RoutesError(R3Error):
    """Routes that came from outside have a wrong shape, dtype or length."""


class CodecError(R3Error):
    """Bytes that are not a valid envelope, or routes that an encoding cannot hold."""


class ConfigError(R3Error):
    """A setting that cannot work; raised before training starts."""


class HostError(R3Error):
    """A host lacks a seam the plugin needs, or has moved it."""


class ReplayError(R3Error):
    """Routes that do not fit the router asking for them."""
