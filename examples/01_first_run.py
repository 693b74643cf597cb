"""Train sixteen CartPole agents at once, look at their returns, and let the best one act."""

import numpy as np

import shoal


def main(agents: int = 16, steps: int = 100_000, root: str = "runs") -> shoal.Run:
    run = shoal.train(env="cartpole", agents=agents, steps=steps, seed=0, root=root)
    print("mean return of each agent:", np.round(run.returns, 1))

    best = run.best()
    action = best.act(np.zeros(4, np.float32))  # cart and pole at rest; Gymnasium's step takes it as it is
    print("the best agent pushes", "right" if action else "left")

    everyone = run.policy("all")  # the whole population as one program
    actions = everyone.act(np.zeros((agents, 8, 4), np.float32))  # [P, B] for obs [P, B, 4]
    print("actions of all agents in eight envs each:", actions.shape)
    return run


if __name__ == "__main__":
    main()
