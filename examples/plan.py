"""Does it fit, and how long will it take? Seconds, on any machine."""

import podium

if __name__ == "__main__":
    for machine in ("v6e-8", "v5e-8", "h100-8"):
        plan = podium.plan("Qwen/Qwen2.5-3B-Instruct", on=machine, fast=True)
        print(machine, plan.verdict, f"{plan.spare_bytes / 2**30:.1f} GiB to spare on a device")
