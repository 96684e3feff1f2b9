"""The line to another host: its last words arrive, whatever the other end is still saying."""

import itertools
import os
import socket
import ssl
import threading
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import pytest
from patience import SECONDS

from distbelief.core import roles
from distbelief.places.channel import OF_HOST, Bridge, Channel
from distbelief.places.join.authority import Authority
from distbelief.places.messages import Beat, ChannelMessage, Dismiss
from distbelief.transport.secure import TlsSocket, context

TIMES = 40
AUTHORITY = Authority("line")
FIRST = context(ssl.PROTOCOL_TLS_SERVER, AUTHORITY.issue(roles.SUPERVISOR))
OTHER = context(ssl.PROTOCOL_TLS_CLIENT, AUTHORITY.issue("attendant"))


def greeted() -> tuple[TlsSocket, TlsSocket]:
    """Both ends of a connection under TLS."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = OTHER.wrap_socket(socket.create_connection(listener.getsockname()), do_handshake_on_connect=False)
        far = FIRST.wrap_socket(listener.accept()[0], server_side=True, do_handshake_on_connect=False)
    assert isinstance(near, TlsSocket)
    assert isinstance(far, TlsSocket)
    greeting = threading.Thread(target=near.greet)
    greeting.start()
    far.greet()
    greeting.join()
    return near, far


def bridged(far: TlsSocket) -> tuple[Bridge, Channel]:
    """A bridge, and the channel that it carries."""
    ours, near = socket.socketpair()
    return Bridge(far, near), Channel(Connection(ours.detach()), decode=OF_HOST)


def test_the_last_word_arrives_while_the_other_end_is_speaking() -> None:
    """What it says then is read by nobody."""
    for _ in range(TIMES):
        (near, speaking), (far, dismissing) = map(bridged, greeted())
        heard: list[ChannelMessage] = []
        speaking.say(Beat())
        assert dismissing.connection.poll(10.0)

        def dismiss(line: Channel = dismissing) -> None:
            line.say(Dismiss(130))
            line.close()

        dismissal = threading.Thread(target=dismiss)
        dismissal.start()
        while speaking.hear_all(heard.append):
            speaking.say(Beat())
        dismissal.join()
        speaking.close()
        assert near.wait(SECONDS)
        assert far.wait(SECONDS)
        assert heard == [Dismiss(130)]


def test_a_line_that_is_cut_ends_on_both_sides_and_raises_nowhere() -> None:
    """What a thread raises fails a test here, and stands on people's terminals elsewhere."""
    for _ in range(TIMES):
        (near, speaking), (far, listening) = map(bridged, greeted())
        speaking.say(Beat())
        assert listening.connection.poll(10.0)
        far.cut()
        assert far.wait(SECONDS)
        assert near.wait(SECONDS)
        speaking.close()
        listening.close()


def test_nothing_is_said_to_an_end_that_is_gone_and_any_other_error_is_raised() -> None:
    for closed in range(2):
        ends = Pipe()
        ends[closed].close()
        Channel(ends[0]).say(Beat())
        ends[not closed].close()
    ours, theirs = Pipe()
    with ours, theirs:
        os.set_blocking(ours.fileno(), False)
        with pytest.raises(BlockingIOError):
            list(map(Channel(ours).say, itertools.repeat(Beat())))
