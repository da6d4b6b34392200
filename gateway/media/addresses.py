"""Which addresses the gateway fetches media from, on behalf of clients that name any host."""

import ipaddress

from penstock.gateway.media.limits import MediaLimits, MediaRejected

_GLOBAL6 = ipaddress.ip_network("2000::/3")
_NAT64 = ipaddress.ip_network("64:ff9b::/96")


def check_address(address: str, limits: MediaLimits) -> None:
    """Reject addresses of this machine and its network, which a client must not reach through the gateway.

    Raises:
        MediaRejected: not a public unicast address.
    """
    if not limits.private and not _public(ipaddress.ip_address(address.partition("%")[0])):
        # Without the address itself, which would disclose how internal names resolve.
        raise MediaRejected(
            "names a host with a private, local or reserved address, which is not allowed "
            "(--allow-private-media-addresses)"
        )


def _public(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    if isinstance(address, ipaddress.IPv6Address):
        if address in _NAT64:
            return _public(ipaddress.IPv4Address(address.packed[-4:]))
        if address.ipv4_mapped or address.sixtofour or address.teredo or address not in _GLOBAL6:
            return False  # these embed IPv4 addresses that have not been checked
    return address.is_global and not (
        address.is_private or address.is_multicast or address.is_reserved or address.is_unspecified
    )
