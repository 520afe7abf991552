"""What can go wrong between a driver and its host. An error of one request is an OSError
of a device's method (see device.py) and ends nothing."""


class SawmillError(Exception):
    """All of the following."""


class NoHost(SawmillError):
    """There is no host to talk to, or it could not be started."""


class Refused(SawmillError):
    """The host refuses this driver. `errno`:
    EBUSY when the device has a driver, EINVAL for an option."""

    def __init__(self, errno: int, message: str):
        super().__init__(message)
        self.errno = errno


class HostGone(SawmillError):
    """The host died or closed the connection. If the host lives, the next driver gets the
    unanswered commands; otherwise they are lost."""


class ProtocolError(SawmillError):
    """The host sent something invalid. The driver has closed the connection."""
