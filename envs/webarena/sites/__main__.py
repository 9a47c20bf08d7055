"""`python -m envs.webarena.sites --port 8000`: open the five sites in your own browser."""

import argparse
import contextlib
import threading

from envs.webarena.sites import SITES, Sites


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m envs.webarena.sites")
    parser.add_argument("--port", type=int, default=8000, help="port to listen on (default: 8000)")
    sites = Sites(parser.parse_args().port)
    token = sites.open()
    for site in SITES:
        address = sites.base_url(site, token).replace(".test", f".localhost:{sites.port}")
        user, password = sites.log_in(site)
        print(f"{address}{f'   user {user}, password {password}' if user else ''}")
    print("Ctrl-C stops the server; changes are lost then.", flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        threading.Event().wait()
    sites.shutdown()


if __name__ == "__main__":
    main()
