"""``python -m kernelproxy.native`` builds the libraries for one interpreter."""

from kernelproxy.native.build import main

if __name__ == "__main__":
    main()
