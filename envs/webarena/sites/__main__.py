"""`python -m envs.webarena.sites --port 8000`: open the five sites in your own browser."""

import argparse
import contextlib
import threading

from envs.webarena.sites import SITES, Sites

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m envs.webarena.sites")
    parser.add_argument("--port", type=int, default=8000, help="port to listen on (default: 8000)")
    sites = Sites(parser.parse_args().port)
    token = sites.open()
    for site in SITES:
        print(sites.base_url(site, token).replace(".test", f".localhost:{sites.port}"))
    print("Ctrl-C stops the server; changes are lost then.", flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        threading.Event().wait()
    sites.shutdown()
