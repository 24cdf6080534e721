from kdtree.cli import main

raise SystemExit(main())
