"""What can go wrong between a driver and its host. What goes wrong with one request is an OSError
of a device's method (see device.py) and ends nothing."""


class SawmillError(Exception):
    """All of the following."""


class NoHost(SawmillError):
    """There is no host to talk to, or it could not be started."""


class Refused(SawmillError):
    """The host does not want this driver. `errno`:
    EBUSY when the device has a driver, EINVAL for an option."""

    def __init__(self, errno: int, message: str):
        super().__init__(message)
        self.errno = errno


class HostGone(SawmillError):
    """The host died or closed the connection. What was not answered is given to nobody any more, or
    to the next driver when the host lives."""


class ProtocolError(SawmillError):
    """The host said something that makes no sense. The driver has closed the connection."""
